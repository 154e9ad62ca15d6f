"""Ledgers: one module for each thing that can keep the books."""
