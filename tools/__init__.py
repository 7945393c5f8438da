"""Programs for the project's developers, run from the repository's root; they are not part of the wheel."""
