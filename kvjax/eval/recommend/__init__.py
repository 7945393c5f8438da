"""Which policy suits a user's own texts: needles and next-token loss in them, at the bytes that each cache takes."""
