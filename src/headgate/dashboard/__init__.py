"""The dashboard: one module for each page."""
