"""What `headgate slots` shows and does."""
