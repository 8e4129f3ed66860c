"""Marks behind the interfaces of training frameworks; none of them is imported."""
