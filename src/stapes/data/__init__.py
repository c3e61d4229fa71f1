"""From recordings with words to batches: corpora, checks, buckets, augmentation, vocabularies."""
