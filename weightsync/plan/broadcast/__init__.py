"""Plans of buckets that holders broadcast."""
