"""Policies of papers that the product's are measured against, as entries for its registry (``entries``)."""
