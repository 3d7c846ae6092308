"""Self-contained pages: templates filled with values, and drawings as SVG."""
