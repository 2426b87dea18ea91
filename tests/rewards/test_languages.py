"""The languages that IFEval asks for are told, and what has no language is not."""

import time

import pytest

from agentrl_rewards.languages import detect_language

TEXTS = {
    "en": "We walked along the river until it was dark, and then we took the last train home.",
    "es": "Caminamos por la orilla del río hasta que se hizo de noche y luego tomamos el tren.",
    "pt": "Caminhamos ao longo do rio até escurecer e depois apanhamos o último comboio.",
    "fr": "Nous avons marché le long de la rivière et puis nous avons pris le dernier train.",
    "it": "Abbiamo camminato lungo il fiume e poi abbiamo preso l'ultimo treno per la città.",
    "de": "Wir gingen am Fluss entlang, bis es dunkel war, und nahmen dann den letzten Zug.",
    "pl": "Szliśmy wzdłuż rzeki, aż zrobiło się ciemno, a potem wsiedliśmy do pociągu.",
    "fi": "Kävelimme joen rantaa kunnes oli pimeää, ja sitten menimme viimeisellä junalla kotiin.",
    "vi": "Chúng tôi đi dọc bờ sông cho đến khi trời tối và sau đó bắt chuyến tàu cuối cùng.",
    "sw": "Tulitembea kando ya mto hadi giza lilipoingia, na kisha tukapanda treni ya mwisho.",
    "ru": "Мы шли вдоль реки, пока не стемнело, а потом сели на последний поезд.",
    "uk": "Ми йшли вздовж річки, поки не стемніло, а потім сіли на останній потяг.",
    "bg": "Вървяхме покрай реката, докато се стъмни, и после взехме последния влак.",
    "ar": "مشينا على طول النهر حتى حل الظلام ثم ركبنا القطار الأخير إلى البيت.",
    "fa": "ما در کنار رودخانه راه رفتیم تا هوا تاریک شد و بعد آخرین قطار را گرفتیم.",
    "ur": "ہم دریا کے کنارے چلتے رہے اور پھر آخری ٹرین سے گھر گئے۔",
    "hi": "हम अंधेरा होने तक नदी के किनारे चलते रहे और फिर आखिरी ट्रेन से घर गए।",
    "mr": "अंधार होईपर्यंत आम्ही नदीच्या काठाने चाललो आणि मग शेवटची गाडी पकडली.",
    "ne": "हामी अँध्यारो नहुन्जेल नदीको किनारै किनार हिँड्यौं र अन्तिम रेलमा घर गयौं।",
    "ja": "暗くなるまで川に沿って歩き、それから最終列車に乗りました。",
    "ko": "우리는 어두워질 때까지 강을 따라 걸었다.",
    "th": "เราเดินไปตามแม่น้ำจนมืด",
    "bn": "আমরা অন্ধকার না হওয়া পর্যন্ত নদীর ধারে হাঁটলাম।",
    "ta": "இருட்டும் வரை ஆற்றங்கரையில் நடந்தோம்.",
    "te": "చీకటి పడే వరకు నది ఒడ్డున నడిచాము.",
    "kn": "ಕತ್ತಲಾಗುವವರೆಗೆ ನದಿಯ ದಡದಲ್ಲಿ ನಡೆದೆವು.",
    "ml": "ഇരുട്ടുന്നതുവരെ ഞങ്ങൾ പുഴയോരത്തു നടന്നു.",
    "gu": "અંધારું થયું ત્યાં સુધી અમે નદી કિનારે ચાલ્યા.",
    "pa": "ਹਨੇਰਾ ਹੋਣ ਤੱਕ ਅਸੀਂ ਨਦੀ ਦੇ ਕੰਢੇ ਤੁਰੇ।",
    "he": "הלכנו לאורך הנהר עד שהחשיך.",
}
"""A text in each of the languages that IFEval asks for."""


@pytest.mark.parametrize("language", TEXTS)
def test_texts_are_told(language):
    text = TEXTS[language]
    assert detect_language(text) == language
    assert detect_language(text.upper()) == language
    assert detect_language(f"{text} (see https://example.org/page)") == language


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("De hond is niet in de tuin en het regent ook nog.", "nl"),
        ("Hunden är inte här och det regnar också.", "sv"),
        ("我们沿着河一直走到天黑。", "zh"),
        ("Ο σκύλος δεν είναι εδώ.", "el"),
        ("", None),
        ("12 + 3 = 15!", None),
        ("Xqz", None),
    ],
)
def test_neighbours_and_texts_without_a_language(text, language):
    assert detect_language(text) == language


def test_a_quoted_word_of_another_script_changes_nothing():
    assert detect_language("The word река is what the Russians call a river.") == "en"
    assert detect_language("Слово river есть и в этом тексте, но он по-русски.") == "ru"


def test_a_megabyte_takes_no_time():
    started = time.process_time()
    for text in ("a" * 1_000_000, "और " * 300_000, "é\u0301" * 500_000):
        detect_language(text)
    assert time.process_time() - started < 1.0
