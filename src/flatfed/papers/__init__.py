"""The tables and figures of five papers as data, and each of their cells as a run.

Each paper is one TOML file: its numbers as printed (accuracies in percent), its names for data sets, models,
partitions and methods with what they are here, its settings and where they come from, and what our own
tuning found. Tables are named paper/table, for instance fedsagd/table2. Figures are listed for the
accuracies in their captions; those that show something else say what ("diagnostic"). `small.toml` says how
`--scale small` shrinks a run. `schema` describes the files, `presets` turns cells into configs, `sources`
says where their settings come from, `reproduce` runs them, `coverage` lists what there is of each paper.
"""

from flatfed.papers.schema import papers, tables

__all__ = ["papers", "tables"]
