"""Tools as data: what a tool is, catalogues of them, and reading catalogues from files."""

from jaxtool.tools.catalog import ToolCatalog
from jaxtool.tools.readers import read_catalog, read_tool_names
from jaxtool.tools.schema import normalise_schema
from jaxtool.tools.tool import CatalogError, Tool, ToolDocument

__all__ = ["CatalogError", "Tool", "ToolCatalog", "ToolDocument", "normalise_schema", "read_catalog", "read_tool_names"]
