"""Detects the language of a text from its script and its most frequent short words.

Covers the languages that IFEval asks for and those that are easily mistaken for them. Works for
full sentences and longer; a name or a single word may contain no frequent word, and then the
language is unknown.
"""

from __future__ import annotations

import re
from collections import Counter

_SCRIPTS = {
    "latin": "A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff",
    "cyrillic": "\u0400-\u052f",
    "arabic": "\u0620-\u064a\u066e-\u06d3\u06fa-\u06ff",
    "devanagari": "\u0900-\u097f",
    "greek": "\u0370-\u03ff",
    "hebrew": "\u05d0-\u05ea",
    "thai": "\u0e00-\u0e7f",
    "hangul": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af",
    "kana": "\u3040-\u30ff",
    "han": "\u3400-\u4dbf\u4e00-\u9fff",
    "bengali": "\u0980-\u09ff",
    "gurmukhi": "\u0a00-\u0a7f",
    "gujarati": "\u0a80-\u0aff",
    "tamil": "\u0b80-\u0bff",
    "telugu": "\u0c00-\u0c7f",
    "kannada": "\u0c80-\u0cff",
    "malayalam": "\u0d00-\u0d7f",
}
_LETTERS = {script: re.compile(f"[{ranges}]") for script, ranges in _SCRIPTS.items()}
_ONE_LANGUAGE = {
    "greek": "el",
    "hebrew": "he",
    "thai": "th",
    "hangul": "ko",
    "bengali": "bn",
    "gurmukhi": "pa",
    "gujarati": "gu",
    "tamil": "ta",
    "telugu": "te",
    "kannada": "kn",
    "malayalam": "ml",
}
_WORD = re.compile(r"[^\W\d_]+(?:[\u0900-\u0903\u093a-\u094f\u0962\u0963]+[^\W\d_]*)*")
"""Letters, and the vowel signs of Devanagari, which `re` does not count as letters."""
_URL = re.compile(r"\w{2,10}://\S+")
_MAX_CHARS = 20_000


_FREQUENT = {
    "latin": """
    en: the of and to in is that it for was on are with as be this have from or by not you they at
        an which we their has there will can i my your he she his her;
    de ßäöü: der die das und ist nicht ein eine zu den von mit sich auf für im dem auch es an als
        wir ich sie er wie wird sind oder bei aus nach einen einer dass werden hat kann;
    fr çœèêàùîô: le la les de des et est un une que qui dans pour pas sur au il elle ce cette sont
        plus avec nous vous je ne se par mais du en ou être leur aux ses son;
    es ñ¿¡: el la los las de que y en un una es por con para no se del al lo como más pero sus su
        este esta son muy también hay ser está fue cuando porque yo mi;
    pt ãõç: o a os as de que e em um uma é por com para não se do da dos das no na ao mais mas seu
        sua são muito também como foi ser está pelo pela eu você isso quando;
    it ìò: il lo la gli le di che e un una è per con non si del della dei delle al nel più ma come
        sono anche questo questa mi ci suo sua alla da essere ha i molto perché;
    pl łśżźąęćń: i w na z do nie się że jest to jak ale o po od za przez dla czy tak są co już był
        była tym tego jego jej które który ma też oraz ich być bardzo;
    fi äö: ja on ei se että oli hän mutta kun niin myös olen ovat joka tai kuin sen nyt mitä minä
        sinä me he tämä jos vain ole hyvin voi kanssa ne ollut jotka sekä;
    vi đơưạảấầậắằẹếềệịọốồộớờợụứừựỳỷ: và là của có không được một những các cho trong với người này
        đã để khi đến tôi bạn chúng ta rất như từ về ở nhiều cũng sẽ ra vào thì;
    sw: na ya wa kwa ni katika za la cha hii huo huyo ambayo kama lakini pia yake wake watu kuwa
        sana mimi wewe yeye sisi hiyo hayo moja vya kila baada ili hata bila zaidi;
    nl: de het een en van is dat niet op te zijn met voor ik je aan hij er maar om ook als dit die
        wij ze naar bij nog uit wordt heeft kan;
    sv å: och att det i är en som på för av med den inte till ett har jag var om vi de men kan från
        så eller också när mycket;
    da åæø: og at det er en i på til af for ikke med der den de et har jeg som vi var om kan men fra
        så eller også meget;
    ro șțăîâ: și de la în este un o nu cu care pe din că mai pentru sunt a fost ce dar sau ca într
        foarte când acest această lui ei;
    tr ğışç: ve bir bu da de için ile çok ne o gibi daha ama var olarak olan en ben sen biz kadar
        sonra değil mi her şey;
    id: yang dan di itu dengan untuk tidak ini dari dalam akan pada juga saya ke karena ada kami
        mereka adalah oleh sudah bisa atau seperti;
    cs ěřůčšž: a je v na se že to s z do o i k ale jako za pro by po jsem jsou které který byl tak
        být také jeho už nebo velmi
    """,
    "cyrillic": """
    ru ыэёь: и в не на что я с он как это по но они мы из у за то так же от его для вы все она был
        или когда очень бы есть только если;
    uk іїєґь: і в не на що я з він як це по але вони ми із у за то так же від його для ви всі вона
        був та або коли дуже є тільки якщо до й;
    bg ъ: и в не на че аз с той как това по но те ние от за то така да се са е ще си му я или когато
        много има само ако който която във беше
    """,
    "arabic": """
    ar ةىأإؤئ: في من على أن إلى هذا هذه التي الذي كان لا ما عن مع هو هي ذلك كما قد لم أو بعد كل بين
        يكون كانت إن ثم أنا نحن;
    fa پچژگ: و در به از که این را با است برای آن یک می خود تا بر های هم او ما شما شد بود نیست هستند
        کرد هر اما یا باید من;
    ur ٹڈڑںےہھ: کے ہے میں کی اور سے کا کو پر نے یہ ہیں کہ وہ اس ایک بھی تھا تھی ہو نہیں کر جو ہم آپ
        گیا لیے ہوتا ساتھ بہت
    """,
    "devanagari": """
    hi: है के में की और से को का यह हैं पर ने कि वह एक भी था थी हो नहीं कर जो हम आप लिए साथ बहुत तो
        ही इस उस मैं;
    mr ळ: आहे आणि या तो ती ते हे नाही आहेत मी एक व होता होती करून साठी मध्ये पण आम्ही तुम्ही खूप
        त्या त्याच्या असे काही म्हणून की च;
    ne: छ र को मा हो छन् पनि लाई गर्न यो त्यो एक भएको थियो हुन्छ छैन धेरै हामी तपाईं म उनी गरेको
        लागि तर भने हुन् गर्छ साथै यस
    """,
}
"""Script -> languages, each with letters and words that are frequent in it and rare in its
neighbours: `code letters: words;`."""
_SMALL: dict[str, dict[str, tuple[str, set[str]]]] = {
    script: {
        head.split()[0]: (head.partition(" ")[2].strip(), set(words.split()))
        for head, _, words in (entry.strip().partition(":") for entry in table.split(";"))
    }
    for script, table in _FREQUENT.items()
}
"""Script -> language -> its letters and words."""
_WEIGHTS = {
    script: Counter(word for _, words in languages.values() for word in words)
    for script, languages in _SMALL.items()
}
"""Script -> word -> number of that script's languages that share the word."""

LANGUAGES = frozenset(_ONE_LANGUAGE.values()) | {"ja", "zh"} | {
    language for languages in _SMALL.values() for language in languages
}  # fmt: skip
"""ISO 639-1 codes of the languages that can be detected."""


def detect_language(text: str) -> str | None:
    """Returns the ISO 639-1 code of the text's language, or None if it is unclear.

    Reads the first 20,000 characters. If the script of most letters is used by only one of the
    languages, that language is returned. Otherwise each frequent word adds 1, divided by the number
    of languages that share it, to its language's score, each typical letter adds 1/3, and the
    highest score wins.
    """
    text = _URL.sub(" ", text[:_MAX_CHARS].lower())
    letters = Counter({script: len(found.findall(text)) for script, found in _LETTERS.items()})
    if letters["kana"] * 20 > letters["han"] + letters["kana"]:
        letters["kana"] += letters["han"]  # Japanese has both, Chinese no kana
    script, count = letters.most_common(1)[0]
    if not count:
        return None
    if script in ("kana", "han"):
        return "ja" if script == "kana" else "zh"
    if script in _ONE_LANGUAGE:
        return _ONE_LANGUAGE[script]
    words = Counter(_WORD.findall(text))
    shared = _WEIGHTS[script]
    scores = {
        language: sum(words[word] / shared[word] for word in frequent)
        + sum(map(text.count, letters)) / 3
        for language, (letters, frequent) in _SMALL[script].items()
    }
    best, second = sorted(scores, key=lambda each: -scores[each])[:2]
    return best if scores[best] > scores[second] else None
