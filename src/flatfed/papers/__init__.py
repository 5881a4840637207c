"""The tables and figures of five papers as data, and each of their cells as a run.

Each paper is one TOML file: its numbers as printed (accuracies in percent), its names for data sets, models,
partitions and methods with what they are here, its settings and where they come from, and what our own
tuning found. Tables and figures are named paper/table, for instance fedsagd/table2 or fedswa/figure5; figures
have panels, which say what is drawn of which runs. `scales/` says how `--scale` shrinks a run. `schema`
describes the files, `presets` turns cells into configs, `scaling` shrinks them, `sources` says where their
settings come from, `reproduce` runs them, `results` puts numbers into tables, `measuring` and `drawing` make
figures, `theorems` computes their tables of bounds, `coverage` lists what there is of each paper.
"""

from flatfed.papers.schema import bounds, papers, tables

__all__ = ["bounds", "papers", "tables"]
