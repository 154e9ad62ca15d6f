"""Budget arithmetic: scopes, windows, accounts, reservations, and the rules of a ledger."""
