r"""Rewrites the LaTeX of an answer in one plain spelling, splits texts outside of brackets, and finds the answer in a
reply.

After `clean`, the words of `\text{...}` are in double quotes, `°` is a degree, `%` is a percent sign, and relations
have their shortest names (`\le`, `\ne`). Invariant: `clean` keeps the meaning of a text. A text with an unclear meaning
stays unchanged, and cannot be read as a value later.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

SIGNS = {
    "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "﹣": "-",
    "\N{MULTIPLICATION SIGN}": "\\times ", "⋅": "\\cdot ", "·": "\\cdot ", "∙": "\\cdot ", "÷": "/",
    "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "≡": "\\equiv ", "∈": "\\in ",
    "\N{UNION}": "\\cup ",
    "∩": "\\cap ", "∅": "\\emptyset ", "\N{SET MINUS}": "\\setminus ", "±": "\\pm ",
    "∓": "\\pm ", "∞": "\\infty ", "√": "\\sqrt ",
    "π": "\\pi ", "θ": "\\theta ",
    "\N{DOUBLE-STRUCK CAPITAL R}": "\\mathbb{R}",
    "⟨": "(", "⟩": ")", "º": "°",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\ufe0f": "", "\u200b": "",
}  # fmt: skip
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))
COMMANDS = {
    **dict.fromkeys(("leq", "leqslant", "leqq"), "\\le "),
    **dict.fromkeys(("geq", "geqslant", "geqq"), "\\ge "),
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "\\frac"),
    **dict.fromkeys(("lbrace",), "\\{"),
    **dict.fromkeys(("rbrace",), "\\}"),
    **dict.fromkeys(("langle",), "("),
    **dict.fromkeys(("rangle",), ")"),
    **dict.fromkeys(("lor", "vee"), " or "),
    **dict.fromkeys(("land", "wedge"), " and "),
    **dict.fromkeys(("lvert", "rvert", "vert"), "|"),
    **dict.fromkeys(("left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr"), ""),
    **dict.fromkeys(("displaystyle", "textstyle", "bf", "rm", "it", "mathstrut", "limits", "nonumber"), ""),
    **dict.fromkeys(("quad", "qquad", "enspace", "thinspace", "space", "newline"), " "),
    "neq": "\\ne ", "lt": "<", "gt": ">", "varnothing": "\\emptyset ", "div": "/", "mp": "\\pm ", "degree": "°",
    "lbrack": "[", "rbrack": "]", "colon": ":", "textdollar": "\\$", "dollar": "\\$", "euro": "€", "pounds": "£",
    "dots": "\\ldots ", "cdots": "\\ldots ", "imath": "i", "percent": "%",
}  # fmt: skip
"""Maps a LaTeX command to the spelling that replaces it."""
COMMAND = re.compile(r"\\([a-zA-Z]+)")
FONTS = re.compile(r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathcal|boxed|fbox|framebox|underline|ensuremath)\s*\{")
WORDS = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mathrm|mbox|hbox|operatorname\*?)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
)
COLOURS = re.compile(r"\\(?:text)?color\s*\{\w{1,30}\}")
NAMED_IN_WORDS = (
    "lcm",
    "gcd",
    "sin",
    "cos",
    "tan",
    "arcsin",
    "arccos",
    "arctan",
    "ln",
    "log",
    "exp",
    "max",
    "min",
    "tr",
)
r"""Functions whose names may be written as upright words: `\mathrm{lcm}`."""
LETTERS_IN_WORDS = ("i", "e", "d", "T", "j")
r"""Letters that stay symbols when they are written as upright words: `3\mathrm{i}`."""
POWER_OF_TEN = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d{1,4})(?![\w.^])")
MULTIPLES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
MULTIPLE = re.compile(
    r'(?<=[\d}])(?:(\s*"?)\s*\b(WORD)s?\b(?!\s*")|\s*"\s*(WORD)s?\s*")'.replace("WORD", "|".join(MULTIPLES))
)
"""Matches a word for a power of ten after a number: `3.5 million`."""
THOUSANDS = re.compile(r"(?<![\d,.{])\d{1,3}(?:,\d{3})+(?![\d,])")
EVERYWHERE = re.compile(
    r"""(.*[^\s,;("])[\s,;(]*
        (?: (?:"?\s*for\ (?:all|any|every)(?:\ real(?:\ numbers?)?)?\s*"?|\\forall)\s*([a-z])
            (?:\s*\\in\s*\\mathbb\s*\{?R\}?)?
          | (?:"?\s*(?:for|where)(?:\ (?:all|any|every))?\s*"?\s*|\\forall\s*|[,;(]\s*)
            ([kmn])\s*\\in\s*\\mathbb\s*\{?Z\}?
          | "?\s*for\ (?:all\ |any\ |every\ )?integers?\s*"?\s*([kmn]) )\s*"?\)?$""",
    re.VERBOSE | re.DOTALL,
)
"""Matches an answer that ends with a condition which excludes no real number, or no integer: `f(x) = x` for all *x*."""
SPACED_THOUSANDS = re.compile(r"(?<![\d.,])(?<![\d.,] )([1-9]\d{0,2})((?: \d{3})+)(?! ?[\d/])")
OPEN, CLOSE = "([{", ")]}"
MAX_JOINED = 16


def clean(text: str) -> str:
    """Return the text in the plain spelling that the module's docstring describes, without surrounding spaces and the
    final period."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: f"^{{{''.join(RAISED[sign] for sign in found[0])}}}", text)
    text = re.sub("[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]", lambda found: f" {unicodedata.normalize('NFKC', found[0])}", text)
    text = "".join(SIGNS.get(sign, sign) for sign in text).replace("\N{FRACTION SLASH}", "/")
    text = re.sub('["`]', " ", text).replace("\\!", "")
    text = re.sub(r"(?<!\\)\\[,;: ]|~|\\\n|\s", " ", text)
    text = re.sub(r"\*\*(?=\s*\d)(?<=[\w)}]\*\*)", "^", text).replace("**", " ")
    text = _without_dollars(text)
    text = re.sub(r"<=", r"\\le ", re.sub(r">=", r"\\ge ", re.sub(r"!=", r"\\ne ", text)))
    text = re.sub(r"\\m?(?:left|right)\s*\.", "", COLOURS.sub("", text))
    text = FONTS.sub("{", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "°", text)
    text = re.sub(
        r"(?<=\d)\s*\^\s*\{?\s*(?:\\(?:text|mathrm)\s*\{)?\s*(?:st|nd|rd|th)\s*\}?\s*\}?(?![a-zA-Z])", "", text
    )
    text = WORDS.sub(_words, text)
    text = COMMAND.sub(lambda found: COMMANDS.get(found[1], found[0]), text)
    text = re.sub(r"\\?%|(?i:\bper ?cent(?:age)?\b)", "%", text)
    text = POWER_OF_TEN.sub(r"\1\\times 10^{\2}", text)
    text = MULTIPLE.sub(lambda found: f"\\times 10^{{{MULTIPLES[found[2] or found[3]]}}}{found[1] or ''}", text)
    text = re.sub(r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d{3})", ",", text)
    text = re.sub(r" {2,}", " ", text).strip()
    text = SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text)
    text = EVERYWHERE.sub(_without_condition, text.rstrip(". ").rstrip(",; "))
    return _unwrapped(text.rstrip(",; ")).strip()


def _without_condition(found: re.Match[str]) -> str:
    """Remove a condition such as "for all x". If the condition's variable does not occur in the text before the
    condition, the condition stays."""
    text, name = found[1], found[2] or found[3] or found[4]
    return text if re.search(rf"(?<![a-zA-Z]){name}(?![a-zA-Z])|(?<=\d){name}\b", text) else found[0]


def _words(found: re.Match[str]) -> str:
    word = found[1].strip()
    if word in NAMED_IN_WORDS:
        return f"\\{word} "
    if word in LETTERS_IN_WORDS:
        return word
    return f'"{found[1]}"' if word else " "


def _without_dollars(text: str) -> str:
    r"""Remove the signs that delimit mathematics, such as `$` and `\(`. A lone `$` before a digit means dollars and
    stays."""
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    bare = re.findall(r"(?<!\\)\$", text)
    if len(bare) == 1 and re.search(r"(?<!\\)\$\s*[\d.]", text):
        return re.sub(r"(?<!\\)\$", r"\\$", text)
    return re.sub(r"(?<!\\)\$+", " ", text)


def _unwrapped(text: str) -> str:
    """Remove braces around the whole text, unless they are the braces of a set."""
    while text.startswith("{") and closing(text, 0) == len(text) - 1 and not split(text[1:-1], ",;")[1:]:
        text = text[1:-1].strip()
    return text


def closing(text: str, start: int) -> int:
    """Return the position of the bracket that closes the bracket at `start`, or -1. The two may have different shapes,
    as in the interval `(0, 1]`."""
    depth = 0
    for at in range(start, len(text)):
        if text[at] in OPEN:
            depth += 1
        elif text[at] in CLOSE:
            depth -= 1
            if depth == 0:
                return at
    return -1


def split(text: str, separators: str) -> list[str]:
    """Split the text at the characters in `separators`, except within brackets, quotes and LaTeX environments."""
    parts, depth, begun, quoted, bars = [], 0, 0, False, text.count("|") % 2
    for at, sign in enumerate(text):
        if sign == '"':
            quoted = not quoted
        elif sign in OPEN:
            depth += 1
        elif sign in CLOSE:
            depth -= 1
        elif text.startswith("\\begin", at):
            depth += 1
        elif text.startswith("\\end", at):
            depth -= 1
        elif depth == 0 and not quoted and sign in separators and not (bars and sign == "|"):
            parts.append(text[begun:at])
            begun = at + 1
    return [*parts, text[begun:]]


JOINED = re.compile(r'(?<![\w\\])(?:and|or)(?!\w)|"\s*,?\s*(?:and|or)\s*"')


def alternatives(text: str) -> tuple[list[str], str]:
    """Split the text at commas, semicolons, `or` and `and` outside of brackets. Returns the parts, and what joins them:
    `or`, `and` or `,`."""
    words = JOINED.findall(text)
    joint = "," if not words else "or" if any("or" in word for word in words) else "and"
    marked = JOINED.sub(",", THOUSANDS.sub(_merge_outside(text), text))
    parts = [part.strip() for part in split(marked, ",;")]
    return [part for part in parts if part], joint


def _merge_outside(text: str) -> Callable[[re.Match[str]], str]:
    """Return a replacement function that removes the commas from a number. A number in brackets stays unchanged,
    because `(1,000)` may be a point."""
    depths, depth = [], 0
    for sign in text:
        depth += (sign in "([") - (sign in ")]")
        depths.append(depth)
    return lambda found: found[0] if depths[found.start()] else found[0].replace(",", "")


SAID = re.compile(
    r"(?i:\b(?:answers?|solutions?|result)\b[^.:\n$\\=]{0,40}?(?:\bis\b|\bare\b|:|=)\**)[ \t]*:?[ \t]*"
    r"|^####[ \t]*(?=\\?\$?-?[\d,./]+[ \t]*$)",
    re.MULTILINE,
)
MATHS = re.compile(r"\$\$([^$]+)\$\$|(?<!\\)\$((?:\\\$|[^$\n])+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
LAST_WORDS = re.compile(r"(?:\bis\b|\bare\b|[:=])\s*([^:=]{1,200})$")
SHORT_REPLY = 40
"""Maximum characters of a reply that as a whole may be the answer, such as `D` or `Monday`."""
HOPE = re.compile(r"(?i:\s*I hope it is correct.*$)", re.DOTALL)
SENTENCE = re.compile(r"(?:\.|!|\?)(?=\s|$|\*)|\n")
EXPLAINED = re.compile(r",?\s+(?:since|because|which is|as (?:required|desired|shown|claimed))\b.*$", re.DOTALL)
"""Matches the explanation after an answer: `42, because ...`."""
UNSURE = re.compile(
    r"(?:n['\u2019]t|\b(?:not|or|nor|than|least|most|exceeds?)|[<>≤≥])[\s$*]+-?[\d.,]+\W*$|^[\s$*]*\d+%\d",
    re.IGNORECASE,
)
"""Matches the end of a sentence whose last number is not the answer, such as `41 or 42` or `at least 42`."""
BETWEEN = re.compile(
    r"[\s$,;]|\\[()\[\]]|\\quad|\\text\s*\{|\}|\b(?:and|or|perhaps|maybe|possibly|else)\b|[a-zA-Z](?:_\d)?\s*="
)
NAME = re.compile(r"([a-zA-Z])\s*=\s*$")


def candidates(reply: str) -> list[str]:
    """Return the texts in a reply that may be the answer, the likeliest first. `<answer>` tags and LaTeX boxes are not
    considered."""
    reply = HOPE.sub("", reply.strip())
    found = []
    stated = [match.end() for match in SAID.finditer(reply)]
    if stated:
        rest = reply[stated[-1] :].strip()
        sentence = SENTENCE.split(rest, maxsplit=1)[0]
        found.append(EXPLAINED.sub("", sentence))
        if rest[len(sentence) :].startswith("?"):
            return [rest]
    segments = list(MATHS.finditer(reply))
    if segments:
        first = len(segments) - 1
        while first > 0 and len(segments) - first < MAX_JOINED:
            if not joins(reply[segments[first - 1].end() : segments[first].start()]):
                break
            first -= 1
        after = SENTENCE.split(reply[segments[-1].end() : segments[-1].end() + 60], maxsplit=1)[0]
        texts = [next(group for group in one.groups() if group is not None) for one in segments[first:]]
        found.append(", ".join(texts) + (f" {after}" if len(texts) == 1 and re.match(r"\s*[a-zA-Z]", after) else ""))
        if len(texts) == 1:
            found.append(texts[0])
        return found
    sentences = [one for one in SENTENCE.split(reply[-2000:]) if one and one.strip()]
    if not stated and sentences and unsure(sentences[-1]):
        return [sentences[-1]]
    if sentences and (last := LAST_WORDS.search(sentences[-1])):
        found.append(last[1])
    elif sentences and len(sentences[-1]) <= 200 and (number := re.search(r"-?\d[^a-z]*(?:[a-z]+)?$", sentences[-1])):
        found.append(number[0])
    return found or ([reply] if len(reply) <= SHORT_REPLY else [])


def unsure(sentence: str) -> bool:
    """Return True if the last number of the sentence is not an answer: `at least 42`."""
    return UNSURE.search(sentence) is not None


def joins(between: str) -> bool:
    """Return True if the text between two answers only joins them, like `and`, `or`, a comma or the name of a
    variable."""
    return len(between) <= 60 and not BETWEEN.sub("", between)
