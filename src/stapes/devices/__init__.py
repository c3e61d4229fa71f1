"""Find out what machine this is: the ground floor that knows vendors."""
