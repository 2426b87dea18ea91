"""Telling the languages that IFEval asks for: two texts each, and what must stay untold."""

import time

import pytest

from agentrl_rewards.languages import LANGUAGES, detect_language

TEXTS = {
    "en": ("We walked along the river until it was dark, and then we took the last train home.",
           "Thank you for your letter. My sister will be there on Monday."),
    "es": ("Caminamos por la orilla del río hasta que se hizo de noche y luego tomamos el tren.",
           "Gracias por tu carta. Mi hermana llegará el lunes con los niños."),
    "pt": ("Caminhamos ao longo do rio até escurecer e depois apanhamos o último comboio.",
           "Obrigado pela sua carta. A minha irmã não vem na segunda-feira com as crianças."),
    "fr": ("Nous avons marché le long de la rivière et puis nous avons pris le dernier train.",
           "Merci pour votre lettre. Ma soeur ne viendra pas lundi avec les enfants."),
    "it": ("Abbiamo camminato lungo il fiume e poi abbiamo preso l'ultimo treno per la città.",
           "Grazie della tua lettera. Mia sorella non viene lunedì con i bambini."),
    "de": ("Wir gingen am Fluss entlang, bis es dunkel war, und nahmen dann den letzten Zug.",
           "Danke für deinen Brief. Meine Schwester kommt am Montag nicht mit den Kindern."),
    "pl": ("Szliśmy wzdłuż rzeki, aż zrobiło się ciemno, a potem wsiedliśmy do pociągu.",
           "Dziękuję za list. Moja siostra nie przyjedzie w poniedziałek z dziećmi."),
    "fi": ("Kävelimme joen rantaa kunnes oli pimeää, ja sitten menimme viimeisellä junalla kotiin.",
           "Kiitos kirjeestä. Siskoni ei tule maanantaina, mutta lapset ovat täällä."),
    "vi": ("Chúng tôi đi dọc bờ sông cho đến khi trời tối và sau đó bắt chuyến tàu cuối cùng.",
           "Cảm ơn bạn vì bức thư. Chị tôi sẽ không đến vào thứ hai với các con."),
    "sw": ("Tulitembea kando ya mto hadi giza lilipoingia, na kisha tukapanda treni ya mwisho.",
           "Asante kwa barua yako. Dada yangu hatakuja siku ya Jumatatu na watoto wake."),
    "ru": ("Мы шли вдоль реки, пока не стемнело, а потом сели на последний поезд.",
           "Спасибо за письмо. Моя сестра не приедет в понедельник с детьми, но я буду."),
    "uk": ("Ми йшли вздовж річки, поки не стемніло, а потім сіли на останній потяг.",
           "Дякую за лист. Моя сестра не приїде в понеділок з дітьми, але я буду."),
    "bg": ("Вървяхме покрай реката, докато се стъмни, и после взехме последния влак.",
           "Благодаря за писмото. Сестра ми няма да дойде в понеделник с децата."),
    "ar": ("مشينا على طول النهر حتى حل الظلام ثم ركبنا القطار الأخير إلى البيت.",
           "شكرا على رسالتك. لن تأتي أختي يوم الاثنين مع الأطفال."),
    "fa": ("ما در کنار رودخانه راه رفتیم تا هوا تاریک شد و بعد آخرین قطار را گرفتیم.",
           "از نامه شما ممنونم. خواهرم دوشنبه با بچه ها نمی آید."),
    "ur": ("ہم دریا کے کنارے چلتے رہے اور پھر آخری ٹرین سے گھر گئے۔",
           "آپ کے خط کا شکریہ۔ میری بہن پیر کو بچوں کے ساتھ نہیں آئے گی۔"),
    "hi": ("हम अंधेरा होने तक नदी के किनारे चलते रहे और फिर आखिरी ट्रेन से घर गए।",
           "आपके पत्र के लिए धन्यवाद। मेरी बहन सोमवार को बच्चों के साथ नहीं आएगी।"),
    "mr": ("अंधार होईपर्यंत आम्ही नदीच्या काठाने चाललो आणि मग शेवटची गाडी पकडली.",
           "तुमच्या पत्राबद्दल धन्यवाद. माझी बहीण सोमवारी मुलांसोबत येणार नाही आणि ती घरी आहे."),
    "ne": ("हामी अँध्यारो नहुन्जेल नदीको किनारै किनार हिँड्यौं र अन्तिम रेलमा घर गयौं।",
           "तपाईंको पत्रको लागि धन्यवाद। मेरी बहिनी सोमबार आउने छैन तर म आउँछु।"),
    "ja": ("暗くなるまで川に沿って歩き、それから最終列車に乗りました。",
           "お手紙ありがとう。妹は来ません。"),
    "ko": ("우리는 어두워질 때까지 강을 따라 걸었다.",
           "편지 고맙습니다. 제 여동생은 오지 않습니다."),
    "th": ("เราเดินไปตามแม่น้ำจนมืด", "ขอบคุณสำหรับจดหมาย"),
    "bn": ("আমরা অন্ধকার না হওয়া পর্যন্ত নদীর ধারে হাঁটলাম।", "আপনার চিঠির জন্য ধন্যবাদ।"),
    "ta": ("இருட்டும் வரை ஆற்றங்கரையில் நடந்தோம்.", "உங்கள் கடிதத்திற்கு நன்றி."),
    "te": ("చీకటి పడే వరకు నది ఒడ్డున నడిచాము.", "మీ ఉత్తరానికి ధన్యవాదాలు."),
    "kn": ("ಕತ್ತಲಾಗುವವರೆಗೆ ನದಿಯ ದಡದಲ್ಲಿ ನಡೆದೆವು.", "ನಿಮ್ಮ ಪತ್ರಕ್ಕೆ ಧನ್ಯವಾದಗಳು."),
    "ml": ("ഇരുട്ടുന്നതുവരെ ഞങ്ങൾ പുഴയോരത്തു നടന്നു.", "നിങ്ങളുടെ കത്തിന് നന്ദി."),
    "gu": ("અંધારું થયું ત્યાં સુધી અમે નદી કિનારે ચાલ્યા.", "તમારા પત્ર માટે આભાર."),
    "pa": ("ਹਨੇਰਾ ਹੋਣ ਤੱਕ ਅਸੀਂ ਨਦੀ ਦੇ ਕੰਢੇ ਤੁਰੇ।", "ਤੁਹਾਡੀ ਚਿੱਠੀ ਲਈ ਧੰਨਵਾਦ।"),
    "he": ("הלכנו לאורך הנהר עד שהחשיך.", "תודה על המכתב שלך."),
}  # fmt: skip
IFEVAL = [
    "en", "es", "pt", "ar", "hi", "fr", "ru", "de", "ja", "it",
    "bn", "uk", "th", "ur", "ta", "te", "bg", "ko", "pl", "he",
    "fa", "vi", "ne", "sw", "kn", "mr", "gu", "pa", "ml", "fi",
]  # fmt: skip


def test_every_language_of_ifeval_has_texts():
    assert set(IFEVAL) == set(TEXTS) and set(IFEVAL) <= LANGUAGES


@pytest.mark.parametrize("language", IFEVAL)
def test_texts_are_told(language):
    for text in TEXTS[language]:
        assert detect_language(text) == language, text
        assert detect_language(text.upper()) == language, text
        assert detect_language(f"{text} (see https://example.org/page)") == language, text


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
