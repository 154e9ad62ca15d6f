"""Where commands find things: a service, a token, a ledger, a store."""
