"""What minserve is measured against: each peer is a function, absent when its package is."""
