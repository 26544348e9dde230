"""The languages of the haystacks: sentences without digits from closed grammars, and the needle in each language's words.

Every sentence is one choice from each group, in the pattern's order; groups are written so that any choice agrees with any
other. English has some 5 x 10^8 sentences, the other languages more than 5 x 10^5 each: no paragraph comes twice.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

RulerLanguage = Literal["en", "zh", "es", "ru", "ja"]


@dataclass(frozen=True)
class Wording:
    """One language. `groups`: the sentence's parts in order. The needle's texts hold `{key}` and `{value}`.

    `key_parts`: two groups whose product names the needles; `joint` stands between two sentences.
    """

    groups: tuple[tuple[str, ...], ...]
    key_parts: tuple[tuple[str, ...], tuple[str, ...]]
    needle: str
    before: str
    question: str
    answer_prefix: str
    joint: str = " "

    def sentence(self, draw: random.Random) -> str:
        # random() is several times faster than choice(), and a haystack of 1M tokens has 10^5 sentences
        return "".join([group[int(draw.random() * len(group))] for group in self.groups])

    def key(self, draw: random.Random) -> str:
        return "".join(draw.choice(part) for part in self.key_parts)


def _group(text: str, before: str = "", after: str = "") -> tuple[str, ...]:
    return tuple(f"{before}{part.strip()}{after}" for part in text.split("|"))


_EN = Wording(
    groups=(
        _group(
            """Most of the time|In practice|At first|Years later|In a sense|Looking back|On reflection|More often than not
            |In the beginning|For a long while|As a rule|Oddly enough|In the end|Every so often|Without much notice
            |In a small town|During the long winters|Among friends|Between two projects|At the edge of the market""",
            after=", ",
        ),
        _group(
            """a careful writer|the young founder|an old teacher|the patient reader|a curious student|the tired engineer
            |a good editor|the honest merchant|a stubborn inventor|the quiet librarian|an ambitious painter|the local doctor
            |a retired sailor|the new apprentice|a modest programmer|the village council|a group of neighbours|every designer
            |the whole company|an experienced gardener|the anxious investor|a famous physicist|the night watchman
            |an idle traveller|the family next door""",
            after=" ",
        ),
        _group(
            """learns to value|slowly gives up|begins to question|quietly defends|refuses to discuss|keeps coming back to
            |finds little use for|would rather forget|takes great care of|is surprised by|argues about|writes long letters about
            |depends on|hardly ever notices|makes a habit of|builds a theory around|pays too much for|is proud of
            |borrows freely from|never quite trusts""",
            after=" ",
        ),
        _group(
            """the simplest tools|a plain explanation|the opinion of strangers|hard questions|the work of earlier days
            |an unfinished draft|the rules of the trade|small experiments|a borrowed idea|the slow growth of cities
            |long conversations|the habits of children|a map of the coast|the price of bread|clever shortcuts
            |the memory of failure|a second attempt|the taste of the crowd|ordinary mistakes|the discipline of practice
            |an open notebook|the weather of the season|old machines|the gap between plans and results|a well made chair""",
            after=" ",
        ),
        _group("""because|although|long before|just as|even when|until|unless|in the hope that|now that|and so""", after=" "),
        _group(
            """nobody|the market|a rival|the next generation|common sense|the audience|a close friend|time itself|the evidence
            |public taste|the oldest rule|a lucky accident|the season|a better question|the first version""",
            after=" ",
        ),
        _group(
            """asks for proof|changes direction|turns out to matter|seems to agree|leaves room for doubt|rewards patience
            |comes too late|points the other way|settles the matter|needs more time|tells another story|starts to listen
            |calls for courage|makes the difference|stays the same""",
            after=".",
        ),
    ),
    key_parts=(
        _group("red|blue|green|black|white|yellow|brown|silver|golden|purple|grey|orange"),
        _group("lamp|door|box|car|chair|clock|table|phone|boat|tower|bridge|mirror", before=" "),
    ),
    needle="The special magic number for the {key} is: {value}.",
    before="A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.",
    question="What is the special magic number for the {key} mentioned in the provided text?",
    answer_prefix="The special magic number for the {key} mentioned in the provided text is",
)

_ZH = Wording(
    groups=(
        _group("起初|后来|据说|有一年|每到冬天|很久以前|在小镇上|雨停以后|天亮之前|说来奇怪|通常|偶尔", after="，"),
        _group(
            """年轻的老师|细心的作家|退休的船长|好奇的学生|沉默的工程师|固执的发明家|村里的医生|隔壁的邻居|新来的学徒|诚实的商人
            |有名的画家|爱读书的孩子|守夜的老人|远方的旅客"""
        ),
        _group("慢慢地|认真地|悄悄地|常常|很少|总是|不得不|终于|重新|耐心地"),
        _group("研究|讨论|怀念|修理|描述|收藏|相信|忘记|整理|怀疑|比较|放弃"),
        _group(
            """一本旧书|简单的工具|朋友的意见|城市的历史|河边的风景|一张地图|从前的习惯|别人的故事|面包的价格|一个新办法|没写完的信|老式的机器
            |孩子们的问题|季节的变化"""
        ),
        _group("，因为|，虽然|，直到|，即使|，而且|，可是"),
        _group(
            "没有人注意|大家都同意|时间还很多|结果并不好|道理很明白|天气变冷了|市场不再需要|答案总在变|机会并不多|一切都没有变",
            after="。",
        ),
    ),
    key_parts=(
        _group("红色|蓝色|绿色|黑色|白色|黄色|棕色|银色|金色|紫色|灰色|橙色", after="的"),
        _group("灯|门|箱子|汽车|椅子|时钟|桌子|电话|小船|高塔|石桥|镜子"),
    ),
    needle="{key}的神奇数字是：{value}。",
    before="下面的文字里藏着一个神奇数字。请记住它，之后我会问你这个数字。",
    question="文中提到的{key}的神奇数字是多少？",
    answer_prefix="文中提到的{key}的神奇数字是",
    joint="",
)

_ES = Wording(
    groups=(
        _group(
            """Al principio|Con los años|A menudo|Según dicen|En aquel pueblo|Cada invierno|Sin prisa|Por costumbre
            |Antes del alba|Después de la lluvia|De vez en cuando|Al final""",
            after=", ",
        ),
        _group(
            """el viejo pescador|la joven maestra|el escritor paciente|la médica del barrio|el inventor terco
            |una vecina curiosa|el nuevo aprendiz|la ingeniera cansada|un viajero sin rumbo|la dueña del mercado
            |el bibliotecario|una pintora famosa""",
            after=" ",
        ),
        _group(
            """describe|olvida|estudia|defiende|recuerda|discute|arregla|guarda|compara|abandona|observa con cuidado
            |pone en duda""",
            after=" ",
        ),
        _group(
            """un libro antiguo|las herramientas sencillas|la historia de la ciudad|una carta sin terminar|el precio del pan
            |las costumbres de antes|un mapa de la costa|las preguntas difíciles|el consejo de un amigo|una idea prestada
            |los errores de siempre|el ruido de las máquinas""",
            after=" ",
        ),
        _group("porque|aunque|hasta que un día|justo cuando|mientras|y por eso", after=" "),
        _group(
            """nadie pregunta nada|todos están de acuerdo|cambia el viento|falta tiempo|la respuesta parece clara
            |el mercado cierra|llega el otoño|la gente escucha|sobra paciencia|todo sigue igual""",
            after=".",
        ),
    ),
    key_parts=(
        _group(
            "la lámpara|la puerta|la caja|la silla|la mesa|la torre|la barca|la llave|la ventana|la campana|la copa|la rueda"
        ),
        _group("roja|azul|verde|negra|blanca|amarilla|gris|dorada|morada|plateada|rosada|marrón", before=" "),
    ),
    needle="El número mágico de {key} es: {value}.",
    before="En el texto siguiente se esconde un número mágico. Memorízalo. Después te preguntaré por él.",
    question="¿Cuál es el número mágico de {key} mencionado en el texto?",
    answer_prefix="El número mágico de {key} mencionado en el texto es",
)

_RU = Wording(
    groups=(
        _group(
            """Сначала|Обычно|Каждую зиму|Говорят, что|В том городке|Время от времени|После дождя|Перед рассветом|Как ни странно
            |В конце концов|Много лет подряд|По привычке""",
            after=" ",
        ),
        _group(
            """старый рыбак|молодая учительница|терпеливый писатель|врач из деревни|упрямый изобретатель|новый ученик
            |любопытная соседка|усталый инженер|случайный путник|хозяйка лавки|тихий библиотекарь|известная художница""",
            after=" ",
        ),
        _group(
            "описывает|забывает|изучает|защищает|вспоминает|обсуждает|чинит|хранит|сравнивает|бросает|замечает|проверяет",
            after=" ",
        ),
        _group(
            """старую книгу|простые инструменты|историю города|неоконченное письмо|цену хлеба|прежние привычки|карту побережья
            |трудные вопросы|совет друга|чужую мысль|обычные ошибки|шум машин""",
        ),
        _group(", потому что|, хотя|, пока|, когда|, и поэтому|, но", after=" "),
        _group(
            """никто не спрашивает|все согласны|меняется ветер|не хватает времени|ответ кажется ясным|рынок закрыт
            |приходит осень|люди слушают|терпения достаточно|всё остаётся по-старому""",
            after=".",
        ),
    ),
    key_parts=(
        _group("красной|синей|зелёной|чёрной|белой|жёлтой|серой|золотой|розовой|новой|старой|большой"),
        _group("лампы|двери|коробки|машины|башни|лодки|чашки|книги|картины|сумки|скамейки|ручки", before=" "),
    ),
    needle="Волшебное число для {key}: {value}.",
    before="В следующем тексте спрятано волшебное число. Запомни его. Потом я спрошу тебя о нём.",
    question="Какое волшебное число для {key} названо в тексте?",
    answer_prefix="В тексте названо волшебное число для {key}:",
)

_JA = Wording(
    groups=(
        _group(
            """はじめのうち|毎年の冬|不思議なことに|雨のあとで|夜明け前に|昔から|小さな町で|ときどき|たいてい|何年もたって|気がつくと|結局""",
            after="、",
        ),
        _group(
            """年老いた漁師は|若い先生は|辛抱強い作家は|村の医者は|頑固な発明家は|新しい弟子は|隣の家族は|疲れた技師は|気ままな旅人は|店の主人は|物静かな司書は
            |有名な画家は"""
        ),
        _group(
            """古い本を|簡単な道具を|町の歴史を|書きかけの手紙を|パンの値段を|昔の習慣を|海辺の地図を|難しい質問を|友人の助言を|借りた考えを|いつもの失敗を
            |機械の音を"""
        ),
        _group("ゆっくり|静かに|何度も|丁寧に|こっそり|改めて"),
        _group("調べるが|忘れるが|思い出すが|比べるので|語るので|確かめるので|眺めるが|話題にするので", after="、"),
        _group(
            """誰も尋ねない|みんなが賛成する|風向きが変わる|時間が足りない|答えは明らかだ|市場は静かだ|秋がやって来る|人々は耳を傾ける|何も変わらない|話は続く""",
            after="。",
        ),
    ),
    key_parts=(
        _group("赤い|青い|黒い|白い|黄色い|茶色い|丸い|古い|新しい|大きい|小さい|細い"),
        _group("ランプ|扉|箱|車|椅子|時計|机|電話|船|塔|橋|鏡"),
    ),
    needle="{key}の魔法の数字は{value}です。",
    before="次の文章には魔法の数字が隠されています。覚えておいてください。あとでその数字を尋ねます。",
    question="文章の中で述べられた{key}の魔法の数字は何ですか。",
    answer_prefix="文章の中で述べられた{key}の魔法の数字は",
    joint="",
)

WORDINGS: dict[RulerLanguage, Wording] = {"en": _EN, "zh": _ZH, "es": _ES, "ru": _RU, "ja": _JA}
LANGUAGES: tuple[RulerLanguage, ...] = tuple(WORDINGS)
