"""Packaging: every value comes from settings.ini, which nbdev reads too."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="], interpolation=None)
ini.read(here / "settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]

licenses = {"apache2": "Apache-2.0"}
statuses = [
    "1 - Planning",
    "2 - Pre-Alpha",
    "3 - Alpha",
    "4 - Beta",
    "5 - Production/Stable",
    "6 - Mature",
    "7 - Inactive",
]
readme = here / "README.md"
for_users = ("experiments", "backbones", "serve", "completion")
extras = {o: cfg[f"{o}_requirements"].split() for o in (*for_users, "docs", "dev")}
extras["all"] = [r for o in for_users for r in extras[o]]
extras["dev"] += extras["all"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    keywords=cfg["keywords"],
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else cfg["description"],
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license=licenses[cfg["license"]],
    license_files=["LICENSE"],
    classifiers=[
        f"Development Status :: {statuses[int(cfg['status']) - 1]}",
        f"Intended Audience :: {cfg['audience']}",
        "Programming Language :: Python :: 3",
        "Typing :: Typed",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=[cfg["lib_name"], f"{cfg['lib_name']}.*"]),
    package_data={cfg["lib_name"]: ["py.typed", "*.pyi", "**/*.pyi", "assets/*", "assets/**/*"]},
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "nbdev": [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"],
    },
    zip_safe=False,
)
