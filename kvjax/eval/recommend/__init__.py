"""Recommends a policy for a user's own texts, by needles and next-token loss in them and the bytes of each cache."""
