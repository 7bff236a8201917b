"""Who is served how well, how sure that is, and what it cost: one page that opens anywhere."""

from equifed.report.document import Report, build
from equifed.report.figures import colour, csv_text
from equifed.report.measures import Target
from equifed.report.methods import Method, ReportError, RunData, as_methods, read_methods
from equifed.report.page import render, slug, write_report
from equifed.report.svg import frame, limits, standalone
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
    "colour",
    "csv_text",
    "frame",
    "limits",
    "read_methods",
    "render",
    "slug",
    "standalone",
    "write_report",
]
