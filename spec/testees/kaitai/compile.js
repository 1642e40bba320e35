"use strict";
// node compile.js LANGUAGE DIR: compiles ../../boundary_bundle.ksy to javascript or python.
// Needs the npm packages kaitai-struct-compiler and js-yaml (NODE_PATH says where they lie).
const fs = require("fs");
const path = require("path");
const compiler = require("kaitai-struct-compiler");
const yaml = require("js-yaml");

const [language, folder] = process.argv.slice(2);
const source = path.join(__dirname, "..", "..", "boundary_bundle.ksy");
const description = yaml.load(fs.readFileSync(source, "utf8"));
compiler.compile(language, description, null, false).then(
  (files) => {
    for (const [name, text] of Object.entries(files)) {
      fs.writeFileSync(path.join(folder, name), text);
    }
  },
  (error) => {
    console.error(String(error));
    process.exitCode = 1;
  },
);
