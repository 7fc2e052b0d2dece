"""The words that preset tokenizers are trained on. This is only data, written for this purpose, and
its expansion; no merges are computed here.

Presets have random weights, so the vocabulary need not come from a library. It must split English,
Chinese and code about as finely as a real one, and be the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator

ENGLISH = """
the of and to in a is that for it was on are as with be by this from at or have an not but they
which you one we all can their has will there if more when who so no out up about what into than
them only some could time these two may then do first any my now such like our over me even most
made after also did many before must through years where much your way well down should because
each just those people how too little state good very make world still own see men work long
here get both between life being under never day same another know while last might us great old
year off come since against go came right used take three himself few house use during without
again place around however home small found thought went say part once general high upon school
every yes hello thanks please sorry question answer tell talk speak ask reply word sentence
paragraph page book letter story write read learn teach study student teacher class lesson test
paper idea reason fact truth mind memory language number figure count measure sum total half
third quarter double water fire earth air wind rain snow sun moon star sky sea river lake
mountain forest tree leaf root flower grass field stone sand gold silver iron metal wood glass
oil food bread meat fish fruit apple rice milk egg salt sugar tea coffee wine cup plate knife
table chair bed door window wall floor roof room kitchen garden street road bridge city town
village country nation government president king queen law court police army war peace battle
enemy friend family father mother brother sister son daughter husband wife child baby boy girl
man woman person name body head face eye ear nose mouth tooth tongue neck shoulder arm hand
finger leg foot heart blood bone skin hair brain health doctor nurse hospital medicine disease
pain death birth age young child adult animal dog cat horse cow pig sheep bird chicken snake
insect bee ant mouse lion tiger bear wolf elephant monkey rabbit red blue green yellow black
white brown orange purple grey color light dark bright shadow sound music song voice noise
silence dance game play win lose team ball run walk jump swim fly climb ride drive car bus train
plane ship boat wheel engine machine tool hammer nail screw wire battery power electric energy
heat cold warm hot cool ice steam gas pressure force speed distance length width height weight
mass volume area space point line circle square triangle corner edge side top bottom front back
left north south east west center middle inside outside near far open close begin start end
finish stop continue change move turn push pull lift carry hold drop throw catch break cut build
fix repair clean wash cook eat drink sleep wake dream think believe hope wish want need love
hate fear anger joy sad happy glad afraid brave calm kind cruel gentle honest clever wise
foolish lazy busy free rich poor strong weak fast slow quick early late new fresh ancient modern
simple complex easy difficult hard soft smooth rough sharp flat round straight deep shallow wide
narrow thick thin heavy empty full dry wet clear certain possible likely true false real wrong
correct exact equal different similar common special single whole complete entire main major
minor local global public private natural human social political economic legal medical physical
chemical digital data value type list set map key index array string text char byte block page
cache store load save file folder path disk network server client request response message
packet socket port address host node cluster worker process thread task job queue batch schedule
token model layer weight tensor matrix vector scalar gradient attention expert router head
embedding hidden output input prompt sample prefill decode latent norm kernel device memory
bandwidth latency throughput tokenizer vocabulary transformer function class method module
package import export return yield raise except try finally assert print loop while break
continue lambda async await self none true false integer float boolean object constructor
variable constant parameter argument default option config version update install command
argument error warning debug info log trace event handler callback signal buffer stream channel
pipe lock mutex semaphore barrier atomic commit branch merge rebase push pull clone fork patch
review issue bug feature release deploy monitor metric counter gauge histogram alert dashboard
report benchmark compile link execute parse format encode decode encrypt hash sign verify
compress expand copy delete insert append remove replace search find match sort filter reduce
combine split join group order limit offset range slice row column table schema query record
transaction database measure science theory experiment result method research paper author
journal history culture art picture image photo film video camera phone computer screen keyboard
button menu password account user email website internet market price cost money bank pay buy
sell trade business company office manager worker employee customer service product quality
design project plan goal strategy risk chance luck success failure problem solution decision
choice rule example case detail summary conclusion evidence proof argument opinion view belief
knowledge skill experience habit practice exercise training sport health exercise diet sleep
travel holiday journey trip hotel ticket passport airport station january february march april
may june july august september october november december monday tuesday wednesday thursday
friday saturday sunday morning noon afternoon evening night today tomorrow yesterday week month
century moment hour minute second past present future always often sometimes rarely explain
describe compare define discuss consider suggest propose recommend require include contain
provide support allow enable prevent avoid reduce increase improve develop create produce
generate design discover invent observe notice remember forget understand recognize realize
imagine predict expect assume decide choose prefer agree disagree accept refuse offer promise
threaten warn advise encourage praise blame forgive apologize thank greet invite visit meet join
leave arrive depart return follow lead guide direct control manage organize arrange prepare
protect defend attack fight survive grow rise fall increase shrink spread gather collect
separate divide connect attach fasten release
"""

CHINESE = """
你好 我们 你们 他们 什么 怎么 为什么 因为 所以 但是 如果 可以 没有 不是 这个 那个
一个 现在 时候 知道 今天 明天 昨天 早上 晚上 中国 世界 国家 人民 社会 经济 政治 文化
历史 科学 技术 研究 发展 问题 方法 工作 学习 学生 老师 学校 大学 语言 中文 英文 文字
文章 句子 意思 例子 答案 回答 请问 谢谢 对不起 再见 模型 数据 计算 机器 电脑 网络
系统 程序 代码 函数 变量 参数 训练 推理 注意力 缓存 内存 显存 服务器 人工智能 深度学习
神经网络 自然语言 大语言模型 分布式 并行 通信 带宽 延迟 吞吐量 预填充 解码 专家 月亮
太阳 星星 天空 大地 山水 河流 海洋 森林 花草 动物 植物 春天 夏天 秋天 冬天 下雨 下雪
天气 温度 家庭 父亲 母亲 孩子 朋友 爱情 生活 健康 医院 医生 身体 眼睛 耳朵 手机 电话
电视 电影 音乐 图片 视频 吃饭 喝水 睡觉 起床 走路 跑步 开车 飞机 火车 汽车 地铁 城市
农村 北京 上海 广州 深圳 香港 台湾 道路 开始 结束 继续 停止 增加 减少 提高 降低 变化
影响 结果 原因 条件 情况 关系 部分 全部 首先 其次 最后 非常 比较 已经 正在 将要 可能
应该 必须 需要 希望 觉得 认为 相信 喜欢 讨厌 高兴 难过 美丽 简单 复杂
"""

CODE = """
def class return import from if elif else for while in not and or is None True False self try
except finally raise with as lambda yield async await pass break continue global nonlocal assert
del print len range int str float list dict set tuple bool bytes object super isinstance
enumerate zip map open public private static void const let var function new this null undefined
typeof struct enum impl fn mut use pub mod match where trait type interface extends implements
package func go chan defer select include define ifdef endif namespace template typename virtual
override nullptr char unsigned long double sizeof switch case default do goto printf std vector
string unique_ptr SELECT FROM WHERE INSERT INTO VALUES UPDATE DELETE CREATE TABLE INDEX JOIN
GROUP ORDER BY LIMIT div span html body head href src http https www com org json xml yaml utf
args kwargs init main name file path data value key index items keys values append extend join
split strip format encode decode torch numpy tensor shape dtype device cuda cpu forward backward
grad loss optimizer batch size hidden layer
"""

MARKS = """
== != <= >= -> => += -= *= /= && || :: // /* */ << >> ** ... ++ -- () [] {} (); [] }; ); ], },
), ({ }) (" ") (' ') =" ="" ': ": ', ", {" "} [" "] ]; "), ') ``` ### ## -- --- ==== **** ?. !!
?? ?! .) ," </ /> <!-- --> </> <? ?> @@ ## $$ %% ^^ ~~ __ "" '' \\n \\t %s %d {} {0}
"""

_SUFFIXES = ("s", "ed", "ing", "er", "ly", "ness", "able", "ful", "less", "ment", "ion", "ist")


def _inflect(word: str) -> Iterator[str]:
    """Yield forms of `word` by the plain English spelling rules. Some are not real words."""
    for suffix in _SUFFIXES:
        stem, end = word, suffix
        if word.endswith("e") and suffix[0] in "eia":
            stem = word[:-1]
        elif word.endswith("y") and len(word) > 2 and word[-2] not in "aeiou":
            stem, end = (word[:-1], "ies") if suffix == "s" else (word[:-1] + "i", suffix)
            if suffix == "ing":
                stem = word
        elif suffix == "s" and word.endswith(("s", "x", "ch", "sh")):
            end = "es"
        yield stem + end


def weighted_pieces() -> Iterator[tuple[bytes, int]]:
    """Yield pieces of text as a pre-tokenizer would cut them, with their frequency.

    The counts only set the order in which merges are learned: frequent English first, then common
    Chinese characters, then inflected and capitalised forms, and last every other Han character
    once, which fills large vocabularies.
    """
    for rank, word in enumerate(dict.fromkeys(ENGLISH.split())):
        count = 400_000 // (rank + 20)
        for form, share in ((f" {word}", 10), (word, 4), (f" {word.capitalize()}", 2)):
            yield form.encode(), max(2, count * share // 10)
        yield word.capitalize().encode(), max(2, count // 10)
        for inflected in _inflect(word):
            yield f" {inflected}".encode(), max(2, count // 40)
    for rank, word in enumerate(CODE.split()):
        count = 20_000 // (rank + 10)
        for form in (word, f" {word}", f"_{word}", f".{word}", f"({word}", f"\t{word}"):
            yield form.encode(), max(3, count)
    for mark in MARKS.split():
        yield mark.encode(), 300
        yield f" {mark}".encode(), 200
        yield f"{mark}\n".encode(), 60
    for width in (1, 2, 3, 4, 6, 7, 8, 11, 12, 15, 16, 20, 24, 32, 64):
        yield b" " * width, 2_000 // width
        yield b"\n" * width, 1_000 // width**2 + 1
        yield b"\t" * width, 500 // width**2 + 1
    for number in range(1000):
        yield str(number).encode(), 900 if number < 10 else 400 if number < 100 else 50
        yield f"{number:03}".encode(), 20
    for word in CHINESE.split():
        yield word.encode(), 250
    yield from _characters()


def _characters() -> Iterator[tuple[bytes, int]]:
    """Yield single characters: GB2312's first level (3,755 common ones) before its second."""
    for first in range(0xB0, 0xF8):
        for second in range(0xA1, 0xFF):
            try:
                character = bytes((first, second)).decode("gb2312")
            except UnicodeDecodeError:
                continue
            yield character.encode(), 12 if first < 0xD8 else 3
    for low, high, count in (
        (0x00C0, 0x0180, 8),  # accented Latin
        (0x0391, 0x03CA, 8),  # Greek
        (0x0410, 0x0450, 8),  # Cyrillic
        (0x2010, 0x2027, 30),  # dashes, quotes, ellipsis
        (0x3001, 0x3012, 60),  # Chinese punctuation
        (0xFF01, 0xFF1F, 60),  # full-width punctuation and digits
        (0x3041, 0x3097, 8),  # Hiragana
        (0x30A1, 0x30FB, 8),  # Katakana
        (0x4E00, 0x9FA6, 1),  # the unified Han block
    ):
        for code in range(low, high):
            yield chr(code).encode(), count
