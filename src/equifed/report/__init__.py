"""Who is served how well, how sure that is, and what it cost: one page that opens anywhere."""

from equifed.report.charts import colour, draw_figures
from equifed.report.document import Report, build
from equifed.report.methods import (
    PLAN,
    Method,
    ReportError,
    Scale,
    as_methods,
    read_comparison,
    read_methods,
    read_plan,
)
from equifed.report.page import (
    frontier_svg,
    render,
    render_participant,
    slug,
    write_card,
    write_report,
)
from equifed.report.svg import frame, limits, standalone
from equifed.report.tables import as_json, csv_text, list_comparison
from equifed.report.text import describe_warnings, write_headline
from equifed.report.verdict import Verdict, write_verdict

__all__ = [
    "PLAN",
    "Method",
    "Report",
    "ReportError",
    "Scale",
    "Verdict",
    "as_json",
    "as_methods",
    "build",
    "colour",
    "csv_text",
    "describe_warnings",
    "draw_figures",
    "frame",
    "frontier_svg",
    "limits",
    "list_comparison",
    "read_comparison",
    "read_methods",
    "read_plan",
    "render",
    "render_participant",
    "slug",
    "standalone",
    "write_card",
    "write_headline",
    "write_report",
    "write_verdict",
]
