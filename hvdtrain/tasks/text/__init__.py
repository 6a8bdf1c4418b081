"""Text: corpora, vocabularies, masks, models, and the settings of a run on them."""
