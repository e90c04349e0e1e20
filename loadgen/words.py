"""Words to make prompts of, in languages whose text servers and tokenizers treat differently. Pure.

English words are short and frequent, so that most tokenizers give about one token a word. The others are common words
too; what counts is their bytes: a character of Chinese or an emoji is often several tokens, and half of it cannot be
shown.
"""

import random
from collections.abc import Mapping

_ENGLISH = """
able about above act add after again age ago air all also always and animal answer any area arm ask away back bad
ball bank base be bear beat because bed before begin being best better big bird black blue boat body book both box
boy bring brother build busy but buy by call came can car care carry case catch cause center change check child
city class clean clear close cold color come common cook cool copy corner could count country course cover cross
cry cut dark day deep did do dog done door down draw dream drive drop dry each early earth east easy eat edge eight
end enough even ever every eye face fact fall family far farm fast father feel feet few field fill find fine finger
fire first fish five floor fly follow food foot for force form four free friend from front full game gave get girl
give glass go gold good got great green ground group grow had hair half hand happy hard has hat have he head hear
heart heat help her here high hill him his hold home hope horse hot hour house how idea if in island it job join
jump just keep key kind king knew know land language large last late laugh lead learn leave left leg less let
letter life light like line list listen little live long look lost lot love low machine made make man many map mark
"""

POOLS: Mapping[str, tuple[str, ...]] = {
    "en": tuple(_ENGLISH.split()),
    "de": tuple("Haus Straße über schön Mädchen Größe früh Tür grün für müssen Wörter heißt Übung natürlich".split()),
    "fr": tuple("école été garçon être déjà où naïve cœur français très façon hôtel après goût leçon".split()),
    "es": tuple("niño mañana corazón qué también año después está teléfono pequeño árbol canción así".split()),
    "ru": tuple("дом человек время хорошо вода сегодня большой новый город друг вместе слово день".split()),
    "el": tuple("σπίτι καλημέρα νερό άνθρωπος ημέρα θάλασσα φίλος σήμερα μεγάλο πόλη λέξη χρόνος".split()),
    "ar": tuple("بيت ماء مدينة كتاب صديق يوم كبير جديد كلمة وقت شمس قلب مدرسة طريق".split()),
    "he": tuple("בית מים עיר ספר חבר יום גדול חדש מילה זמן שמש לב דרך".split()),
    "hi": tuple("घर पानी शहर किताब दोस्त दिन बड़ा नया शब्द समय सूरज दिल रास्ता".split()),
    "th": tuple("บ้าน น้ำ เมือง หนังสือ เพื่อน วัน ใหญ่ ใหม่ คำ เวลา หัวใจ ถนน".split()),
    "ja": tuple("家 水 町 本 友達 日 大きい 新しい 言葉 時間 ありがとう テレビ ひらがな".split()),
    "ko": tuple("집 물 도시 책 친구 하루 크다 새로운 단어 시간 해 마음 길".split()),
    "zh": tuple("家 水 城市 书 朋友 今天 大 新 词语 时间 太阳 心 学校 道路".split()),
    "emoji": tuple("🙂 🎉 👍🏽 🇯🇵 👩‍👩‍👧 ❤️ 🚀 🧑‍🚒 🏳️‍🌈 🐙 ☕ 1️⃣".split()),
}
"""Words by language code; ``emoji`` holds joined sequences, flags and skin tones."""


def draw(rng: random.Random, num_words: int, language: str = "en") -> str:
    """Return so many words of a language, with a space between two."""
    return " ".join(rng.choices(POOLS[language], k=num_words))
