"""What `headgate run` and `headgate runs` show and do while a workflow is carried out."""
