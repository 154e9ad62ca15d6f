"""What `headgate submit` is made of: fields, lines, and waiting for room."""
