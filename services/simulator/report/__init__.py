"""A what-if run as a page that needs nothing beside it: ``charts`` draws (inline SVG), ``run_page`` lays out."""
