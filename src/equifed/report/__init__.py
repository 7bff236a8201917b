"""Who is served how well, how sure that is, and what it cost: one page that opens anywhere."""

from equifed.report.document import Report, build
from equifed.report.measures import Target
from equifed.report.methods import Method, ReportError, RunData, as_methods, read_methods
from equifed.report.page import render, write_report
from equifed.report.tables import as_json

__all__ = [
    "Method",
    "Report",
    "ReportError",
    "RunData",
    "Target",
    "as_json",
    "as_methods",
    "build",
    "read_methods",
    "render",
    "write_report",
]
