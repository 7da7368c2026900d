"""A what-if run as a self-contained page: ``charts`` draws inline SVG, ``run_page`` lays out the page."""
