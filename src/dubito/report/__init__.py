"""Figures and self-contained HTML pages."""

from dubito.report.demo import run_demo, write_demo_page
from dubito.report.gallery import Card, cards_page, write_gallery
from dubito.report.map import Map, map_figure
from dubito.report.map_page import draw_map, write_map_page
from dubito.report.rejection import rejection_figure
from dubito.report.report import ModelReport, model_report
from dubito.report.trust import TrustReport, least_trusted

__all__ = [
    "Card",
    "Map",
    "ModelReport",
    "TrustReport",
    "cards_page",
    "draw_map",
    "least_trusted",
    "map_figure",
    "model_report",
    "rejection_figure",
    "run_demo",
    "write_demo_page",
    "write_gallery",
    "write_map_page",
]
