"""python -m tests.helpers.keys: write docs/keys.md, the table of abilities in docs/README.md, and the keys in the yaml
files of losses and rings."""

from tests.helpers.keys.abilities import INDEX, page_text
from tests.helpers.keys.headers import headers
from tests.helpers.keys.page import PAGE, page
from tests.helpers.keys.rows import Schema, missing

schema = Schema()
if said := missing(schema):
    raise SystemExit("\n".join(said))
for path, text in headers(schema).items():
    path.write_text(text, encoding="utf-8")
PAGE.write_text(page(schema), encoding="utf-8")
INDEX.write_text(page_text(), encoding="utf-8")
