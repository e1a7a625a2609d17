"""Results for people: tables for the terminal, and a self-contained HTML page of a run or a comparison."""
