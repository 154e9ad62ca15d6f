"""The pages for people: what runs, what waits and why, and what it costs."""
