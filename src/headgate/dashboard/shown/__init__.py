"""What pages show, as values: words, rows, bars and ways to other pages."""
