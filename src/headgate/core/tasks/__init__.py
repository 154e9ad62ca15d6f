"""Tasks: their states, what is kept of them, and how they end."""
