# Licensed under the Apache License, Version 2.0.
"""Pages of results: HTML files that need no network."""
