"""Workers in SQL: whom each serves, and the tasks that it has."""
