"""How tools are asked for in other languages than English. Tools, parameters and values stay as their definitions have them.

Nouns stand in their dictionary form, after a colon where the language would inflect them: what is meant is never in doubt.
"""

from __future__ import annotations

import random
from typing import Literal

ToolLanguage = Literal["en", "zh", "es", "ru", "ja"]
OtherLanguage = Literal["zh", "es", "ru", "ja"]

REQUESTS: dict[OtherLanguage, dict[str, tuple[str, ...]]] = {
    "zh": {
        "create": ("请新建一个{noun}。", "我需要一个新的{noun}，请帮我创建。"),
        "update": ("请更新{noun}{code}。", "{noun}{code}已经过时，请更新。"),
        "cancel": ("请取消{noun}{code}。", "帮我把{noun}{code}取消掉。"),
        "search": ("请查找所有符合条件的{noun}。", "哪些{noun}符合条件？请搜索一下。"),
        "share": ("请共享{noun}{code}。", "请把{noun}{code}共享给下面的人。"),
        "approve": ("请批准{noun}{code}。", "{noun}{code}没有问题，请批准。"),
        "label": ("请给{noun}{code}加上标签。", "帮我给{noun}{code}贴上标签。"),
        "export": ("请导出{noun}{code}。", "请把{noun}{code}导出成文件。"),
    },
    "es": {
        "create": ("Por favor, crea algo nuevo: {noun}.", "Necesito algo nuevo, créalo: {noun}."),
        "update": ("Por favor, actualiza esto: {noun} {code}.", "Esto ya no está al día, actualízalo: {noun} {code}."),
        "cancel": ("Por favor, cancela esto: {noun} {code}.", "Cancela esto por mí: {noun} {code}."),
        "search": ("Busca en la lista todo lo que encaje: {noun}.", "¿Qué hay que encaje? Búscalo: {noun}."),
        "share": ("Por favor, comparte esto: {noun} {code}.", "Comparte esto con las personas nombradas: {noun} {code}."),
        "approve": ("Por favor, aprueba esto: {noun} {code}.", "Esto está bien, apruébalo: {noun} {code}."),
        "label": ("Por favor, pon etiquetas a esto: {noun} {code}.", "Etiqueta esto por mí: {noun} {code}."),
        "export": ("Por favor, exporta esto: {noun} {code}.", "Exporta esto a un archivo: {noun} {code}."),
    },
    "ru": {
        "create": ("Пожалуйста, создай новый объект: {noun}.", "Мне нужен новый объект, создай его: {noun}."),
        "update": ("Пожалуйста, обнови: {noun} {code}.", "Это устарело, обнови: {noun} {code}."),
        "cancel": ("Пожалуйста, отмени: {noun} {code}.", "Отмени, пожалуйста, насовсем: {noun} {code}."),
        "search": ("Найди в списке всё, что подходит: {noun}.", "Что подходит? Поищи, пожалуйста: {noun}."),
        "share": ("Пожалуйста, открой доступ: {noun} {code}.", "Поделись с названными людьми: {noun} {code}."),
        "approve": ("Пожалуйста, утверди: {noun} {code}.", "Всё в порядке, утверди: {noun} {code}."),
        "label": ("Пожалуйста, поставь метки: {noun} {code}.", "Пометь для меня: {noun} {code}."),
        "export": ("Пожалуйста, экспортируй: {noun} {code}.", "Сохрани в файл: {noun} {code}."),
    },
    "ja": {
        "create": ("新しい{noun}を作成してください。", "{noun}が新しく必要です。作成してください。"),
        "update": ("{noun}{code}を更新してください。", "{noun}{code}は古くなっています。更新してください。"),
        "cancel": ("{noun}{code}をキャンセルしてください。", "{noun}{code}を取り消してください。"),
        "search": ("条件に合う{noun}をすべて検索してください。", "どの{noun}が条件に合いますか。検索してください。"),
        "share": ("{noun}{code}を共有してください。", "{noun}{code}を次の人たちと共有してください。"),
        "approve": ("{noun}{code}を承認してください。", "{noun}{code}は問題ありません。承認してください。"),
        "label": ("{noun}{code}にラベルを付けてください。", "{noun}{code}に次のラベルを付けてください。"),
        "export": ("{noun}{code}をエクスポートしてください。", "{noun}{code}をファイルに書き出してください。"),
    },
}
"""Verb of an action -> ways to ask for it."""

NOUNS: dict[str, dict[OtherLanguage, str]] = {
    "hotel booking": {"zh": "酒店预订", "es": "reserva de hotel", "ru": "бронирование гостиницы", "ja": "ホテル予約"},
    "train booking": {"zh": "火车票预订", "es": "reserva de tren", "ru": "бронирование поезда", "ja": "列車予約"},
    "flight booking": {"zh": "航班预订", "es": "reserva de vuelo", "ru": "бронирование рейса", "ja": "フライト予約"},
    "table reservation": {"zh": "餐桌预订", "es": "reserva de mesa", "ru": "бронирование столика", "ja": "テーブル予約"},
    "calendar event": {"zh": "日历事件", "es": "evento del calendario", "ru": "событие календаря", "ja": "カレンダーの予定"},
    "team meeting": {"zh": "团队会议", "es": "reunión de equipo", "ru": "совещание команды", "ja": "チーム会議"},
    "training course": {"zh": "培训课程", "es": "curso de formación", "ru": "учебный курс", "ja": "研修コース"},
    "support ticket": {"zh": "支持工单", "es": "ticket de soporte", "ru": "заявка в поддержку", "ja": "サポートチケット"},
    "repair order": {"zh": "维修单", "es": "orden de reparación", "ru": "заказ на ремонт", "ja": "修理依頼"},
    "purchase order": {"zh": "采购订单", "es": "orden de compra", "ru": "заказ на закупку", "ja": "発注書"},
    "customer invoice": {"zh": "客户发票", "es": "factura de cliente", "ru": "счёт клиенту", "ja": "顧客への請求書"},
    "expense claim": {"zh": "费用报销", "es": "nota de gastos", "ru": "заявка на возмещение расходов", "ja": "経費精算"},
    "insurance policy": {"zh": "保险单", "es": "póliza de seguro", "ru": "страховой полис", "ja": "保険契約"},
    "parcel shipment": {"zh": "包裹寄送", "es": "envío de paquete", "ru": "отправка посылки", "ja": "荷物の発送"},
    "storage unit": {"zh": "仓储单元", "es": "unidad de almacenamiento", "ru": "складская ячейка", "ja": "保管庫"},
    "heating schedule": {"zh": "供暖计划", "es": "programa de calefacción", "ru": "график отопления", "ja": "暖房スケジュール"},
    "project milestone": {
        "zh": "项目里程碑",
        "es": "hito del proyecto",
        "ru": "веха проекта",
        "ja": "マイルストーン",
    },
    "press release": {"zh": "新闻稿", "es": "nota de prensa", "ru": "пресс-релиз", "ja": "プレスリリース"},
    "survey campaign": {"zh": "问卷调查活动", "es": "campaña de encuestas", "ru": "опросная кампания", "ja": "アンケート調査"},
    "equipment loan": {"zh": "设备借用", "es": "préstamo de equipo", "ru": "аренда оборудования", "ja": "機材の貸し出し"},
}

DETAILS: dict[OtherLanguage, str] = {
    "zh": "{sentence}详细信息：{details}。",
    "es": "{sentence} Detalles: {details}.",
    "ru": "{sentence} Подробности: {details}.",
    "ja": "{sentence}詳細：{details}。",
}

TALK: dict[OtherLanguage, tuple[str, ...]] = {
    "zh": (
        "{a}加{b}等于多少？请只回答数字。", "{a}和{b}哪个更大？请用一句短话回答。", "请写一句关于数字{a}和水獭的话。",
        "请用两句话解释天空为什么是蓝色的，以数字{a}开头。",
    ),
    "es": (
        "¿Cuánto es {a} más {b}? Responde con el número.", "¿Cuál es mayor, {a} o {b}? Responde con una frase corta.",
        "Escribe una frase sobre el número {a} y una nutria.",
        "Explica en dos frases por qué el cielo es azul. Empieza con el número {a}.",
    ),
    "ru": (
        "Сколько будет {a} плюс {b}? Ответь числом.", "Какое число больше, {a} или {b}? Ответь одной короткой фразой.",
        "Напиши одно предложение о числе {a} и выдре.", "Объясни в двух предложениях, почему небо голубое. Начни с числа {a}.",
    ),
    "ja": (
        "{a}足す{b}はいくつですか。数字で答えてください。", "{a}と{b}はどちらが大きいですか。短い一文で答えてください。",
        "数字の{a}とカワウソについて一文を書いてください。", "空が青い理由を二文で説明し、数字の{a}から始めてください。",
    ),
}  # fmt: skip


def request(language: OtherLanguage, verb: str, noun: str, code: object, details: str, draw: random.Random) -> str:
    """The question for an action on an object. noun: as the catalogue has it. code: None where none is needed."""
    wording = draw.choice(REQUESTS[language][verb])
    sentence = wording.format(noun=NOUNS[noun][language], code=f" {code} " if language in {"zh", "ja"} else code)
    return DETAILS[language].format(sentence=sentence, details=details)
