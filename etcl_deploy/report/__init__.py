"""A page to look at: what a run or a comparison came to, in pictures, in one file."""
