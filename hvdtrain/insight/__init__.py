"""Views of a run for its user: records, profiles, costs, comparisons."""
