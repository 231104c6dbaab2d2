"""What all tests of this folder use."""

from tests.tiny_models import quick_compilation  # noqa: F401
