"""Budgets: scopes, their accounts, and money that is held before work starts."""
