"""What `headgate doctor` and `headgate config` find out."""
