"""Tables of a report: a table as a value with its forms, and one module for each question a table answers."""
