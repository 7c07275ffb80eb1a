"""What tests share: oracles, fakes, tiny models, and the pages that tests compare with tables."""
