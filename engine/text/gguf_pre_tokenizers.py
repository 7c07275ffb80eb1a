"""Pre-tokenizers of byte-level vocabularies in GGUF files, by their names in ``tokenizer.ggml.pre``.

The names are llama.cpp's. Each name stands for one way of splitting a text into words before merging. If llama.cpp's
expressions only approximate those of a model's ``tokenizer.json``, the expressions and normalizers of
``tokenizer.json`` are used here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rules by which texts are split and merged, for one name of ``tokenizer.ggml.pre``.

    Attributes:
        expressions: regular expressions (Oniguruma) that split the text one after another; text between matches becomes
            a word of its own.
        compose: whether texts are normalized first (Unicode's NFC).
        whole_words: whether a word that is a piece of the vocabulary is kept and not merged from smaller pieces
            (``ignore_merges``).
        begin: whether encoding adds the bos token if the file does not specify it.
        spaced: whether pieces are plain text with U+2581 for a space, and bytes are spelled ``<0x0A>``.
    """

    expressions: tuple[str, ...]
    compose: bool = False
    whole_words: bool = False
    begin: bool = False
    spaced: bool = False


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_THREE_DIGITS = r"\p{N}{1,3}"


def _words(numbers: str, *, word: str = _WORD, others: str = _OTHERS, spaces: str = _SPACES) -> str:
    """Return the regular expression that matches contractions, words, numbers, other characters and white space."""
    return f"{_SUFFIX}|{word}|{numbers}{others}{spaces}"


def _cased(numbers: str, suffix: str, *, but: str = "", others: str = _SLASHED) -> str:
    """Return the regular expression that also splits words where capitals begin.

    Characters in ``but`` do not count as letters.
    """
    capitals = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    small = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{capitals}*{small}+{suffix}|{before}{capitals}+{small}*{suffix}|{numbers}{others}{_SPACES}"


_LLAMA3 = _words(_THREE_DIGITS)
_QWEN2 = _words(DIGIT)
_GPT4O = _cased(_THREE_DIGITS, f"{_SUFFIX}?")
# These expressions match groups of three digits, counted from the right. In Oniguruma, which the original tokenizers
# use too, the fractions and superscripts of Latin-1 belong to words: there is no word boundary between 1 and ½, but
# there is one between 1 and ⅓.
_TO_THE_LEFT = r"\d{1,3}(?=(?:\d{3})*\b)"
_TO_THE_LEFT_OF_ALL = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_WORDS = rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_MARKS = r"| ?[\p{P}\p{S}]+"
_CJK = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
_CJK_HANGUL = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_DEEPSEEK3 = (_THREE_DIGITS, _CJK, f"{_DEEPSEEK_WORDS}{_MARKS}[\\r\\n]*{_SPACES}")
_DEEPSEEK_LETTERS = (
    r"A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}"
    r"\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}"
    r"\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}"
    r"\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}"
    r"\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}"
    r"\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}"
    r"\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}"
    r"\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}"
    r"\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}"
    r"\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}"
    r"\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}"
    r"\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}"
    r"\x{1e900}-\x{1e943}"
)
_ASIAN = (
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{f900}-\x{faff}\x{3040}-\x{309f}\x{30a0}-\x{30ff}\x{ff65}-\x{ff9f}"
    r"\x{2f00}-\x{2fdf}\x{e40}-\x{e7f}\x{e80}-\x{eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}"
    r"\x{a9e0}-\x{a9ff}\x{ac00}-\x{d7af}\x{1100}-\x{11ff}]+"
)
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+"
_HALVING_SPACES = r"|\s*[\r\n]+" + "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
_YOUTU = (
    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+|[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}\x{ff1b}"
    rf"\x{{ff0c}}\x{{3001}}-\x{{303f}}\x{{fe30}}-\x{{fe4f}}]+|[\x{{3105}}-\x{{312f}}]+|{_CJK}"
)

_KINDS: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
        "jais exaone4 trillion granite-docling",
        PreTokenizer((GPT2,)),
    ),
    ("mpt olmo modern-bert", PreTokenizer((GPT2,), compose=True)),
    ("starcoder refact smollm codeshell exaone minerva-7b mellum2", PreTokenizer((DIGIT, GPT2))),
    ("command-r", PreTokenizer((DIGIT, GPT2), compose=True)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), whole_words=True, begin=True),
    ),
    ("chatglm-bpe glm4 glm5", PreTokenizer((_LLAMA3,), whole_words=True)),
    ("dbrx smaug-bpe", PreTokenizer((_LLAMA3,))),
    ("qwen2 deepseek-r1-qwen f2llmv2", PreTokenizer((_QWEN2,), compose=True)),
    ("stablelm2 hunyuan solar-open grok-2 kormo megrez", PreTokenizer((_QWEN2,))),
    (
        "qwen35",
        PreTokenizer(
            (_words(DIGIT, word=r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", others=r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),),
            compose=True,
        ),
    ),
    ("ufakzeka", PreTokenizer((f"{_WORD}|{DIGIT}{_OTHERS}{_SPACES}",))),
    ("laguna", PreTokenizer((r"[^\n]+|[\n]+", _QWEN2))),
    ("seed-coder", PreTokenizer((_words(DIGIT, others=r"| ?[^\s\p{L}\p{N}\r\n]+"),))),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer((rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|{DIGIT}{_OTHERS}|\s*[\r\n]|\s+(?!\S)|\s+",)),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            (
                _words(
                    DIGIT,
                    word=r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                    others=r"| ?[^\s\p{L}\p{N}]+[\r\n/]?",
                    spaces=r"|\s*[\r\n]|\s+(?!\S)|\s+",
                ),
            )
        ),
    ),
    ("minicpm5", PreTokenizer((_THREE_DIGITS, _words(r"\p{N}+")), whole_words=True)),
    ("jais-2", PreTokenizer((_words(_THREE_DIGITS, spaces=rf"{_HALVING_SPACES}|\s{{1,2}}(?!\S)|\s{{1}}"),))),
    ("tekken", PreTokenizer((_cased(DIGIT, ""),), whole_words=True, begin=True)),
    ("gpt-4o llama4 granite-embed-multi-97m", PreTokenizer((_GPT4O,), whole_words=True)),
    ("kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    ("tiny_aya cohere2moe", PreTokenizer((_TO_THE_LEFT, _GPT4O))),
    (
        "kimi-k2",
        PreTokenizer(
            (r"\p{Han}+|" + _cased(_THREE_DIGITS, f"{_SUFFIX}?", but=r"&&[^\p{Han}]", others=_OTHERS),),
            whole_words=True,
        ),
    ),
    ("youtu", PreTokenizer((_YOUTU, _cased(DIGIT, f"{_SUFFIX}?")), whole_words=True)),
    ("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", PreTokenizer(_DEEPSEEK3)),
    (
        "spark2_5",
        PreTokenizer((_THREE_DIGITS, _CJK, f"{_DEEPSEEK_WORDS}{_MARKS}|[\\r\\n]|\\s+(?!\\S)|\\s+", DIGIT)),
    ),
    ("afmoe", PreTokenizer((_TO_THE_LEFT_OF_ALL, _ASIAN, _DEEPSEEK3[-1]))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
                r"\s+$",
                _CJK_HANGUL,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, DIGIT))),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"))),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, DIGIT))),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    (
        "chameleon",
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                DIGIT,
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT2,
            ),
            begin=True,
        ),
    ),
    ("gemma4 granite-embed-multi-311m", PreTokenizer((), begin=True, spaced=True)),
    ("sarvam-moe", PreTokenizer((), spaced=True)),
)

PRE_TOKENIZERS = {name: kind for names, kind in _KINDS for name in names.split()}
