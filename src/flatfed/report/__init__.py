"""A self-contained HTML report on one run or a comparison of several."""

from flatfed.report.page import write_report

__all__ = ["write_report"]
