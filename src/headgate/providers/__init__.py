"""Model providers: prices, usage, requests, and their quota APIs."""
