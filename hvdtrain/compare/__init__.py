"""Run folders side by side: tables, pictures, a page; reads files alone."""
