"""Images: data sets, augmentation, models, and the settings of a run on them."""
